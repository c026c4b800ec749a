"""A `python` that starts our scripts in a millisecond: forks of a process that has imported torch and transformers.

bash and torchrun start it like any python. The started process sends arguments, environment, folder, streams and
ignored signals to the server, forwards signals, and exits like the fork. Settings that torch and transformers read
during import, such as HF_HUB_OFFLINE=1, come from the server.
"""
import contextlib
import json
import os
import select
import signal
import socket
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LATE = ("speech.v2", "distill.packed_lm", "diffusion.elbo", "numpy.ma")      # some jobs import them
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class ForkServer:
    """.python is the path of its python. folder: an empty one. All forks end at close() or with this process."""

    def __init__(self, folder):
        import subprocess
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{__file__}" "{folder}/socket" "$@"\n')
        self.python.chmod(0o755)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"{folder}/socket")         # early clients wait
        listener.listen(64)
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fork_server", str(listener.fileno()), str(os.getpid())],
            cwd=ROOT, pass_fds=[listener.fileno()], env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""})
        listener.close()

    def close(self):
        self.server.kill()      # a trainer in this process may have made it ignore SIGTERM
        self.server.wait()


def ask(path, words):
    """Act like the real interpreter with these arguments, in the process that others see."""
    start = next((index for index, word in enumerate(words) if word != "-u"), len(words))
    kind, *rest = words[start:] or [""]
    if not (kind.endswith(".py") or rest and (
            kind == "-m" and rest[0] == "torch.distributed.run" or kind == "-c" and "import torch" in rest[0])):
        os.execv(sys.executable, [sys.executable, *words])
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(path)
    ignored = [number for number in PASSED if signal.getsignal(number) is signal.SIG_IGN]
    job = [words[start:], os.getcwd(), dict(os.environ), ignored]
    for number in PASSED:
        signal.signal(number, lambda number, _: server.send(b"%d" % number))
    socket.send_fds(server, [json.dumps(job).encode()], [0, 1, 2])
    status = int(server.recv(16) or b"1")
    if status < 0:
        if -status in PASSED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def die_with_parent():
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)      # PR_SET_PDEATHSIG


def watch(connection):
    """Fork a job, forward signals to it, kill it if its client is gone, and send its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent()
    message, streams, _, _ = socket.recv_fds(connection, 2**20, 3)
    child = os.fork()
    if child == 0:
        die_with_parent()
        connection.close()
        status = 1
        try:
            status = work(streams, *json.loads(message))
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    for stream in streams:
        os.close(stream)        # a pipe ends when all writers close it
    ended = os.pidfd_open(child)
    while ended not in select.select([connection, ended], [], [])[0]:
        os.kill(child, int(connection.recv(16) or signal.SIGKILL))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.send(b"%d" % status)


def work(streams, words, folder, environment, ignored):
    import atexit
    import runpy
    import threading

    import torch
    for stream, number in zip(streams, range(3)):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number in PASSED:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else default)
    os.fsync = lambda file: None    # tests kill processes, not machines
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or os.cpu_count()))
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or bool(environment.get("PYTHONUNBUFFERED")))
    kind, status = words[0], 0
    for name, module in list(sys.modules.items()) if kind != "-c" else ():
        file = getattr(module, "__file__", None) or sys.prefix
        if file.startswith(ROOT) and not file.startswith(sys.prefix) and not name.startswith(("tests", "__main__")):
            del sys.modules[name]
    sys.executable = environment.get("PYTHON_EXEC") or sys.executable     # torchrun's setting, also for children
    sys.argv = words if kind not in ("-m", "-c") else [kind, *words[2:]]
    sys.path[0] = folder if kind in ("-m", "-c") else os.path.dirname(os.path.realpath(kind))
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    try:
        if kind == "-m":
            sys.modules.pop(words[1], None)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            exec(words[1], {"__name__": "__main__"})
        else:
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as left:
        status = left.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()       # end like the interpreter: threads, exit functions, streams
    atexit._run_exitfuncs()
    for stream in {sys.stdout, sys.stderr, sys.__stdout__}:
        stream.flush()
    return status & 255


def serve(listener, parent):
    import gc
    import importlib
    die_with_parent()
    if os.getppid() != parent:      # the parent has died already
        return
    gc.disable()
    import torch.distributed.run
    import torch.nn.attention.varlen
    import torch.utils.tensorboard  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from tests.helpers import imports  # noqa: F401
    get_checkpoint_conversion_mapping("llama")      # for PEFT: compile a thousand patterns once
    for name in LATE:
        importlib.import_module(name)
    gc.freeze()     # forks share its pages
    gc.enable()
    while True:
        connection, _ = listener.accept()
        with contextlib.suppress(ChildProcessError):        # reap ended forks
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            listener.close()
            try:
                watch(connection)
            finally:
                os._exit(0)
        connection.close()


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    else:
        ask(sys.argv[1], sys.argv[2:])
