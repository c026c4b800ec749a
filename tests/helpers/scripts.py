"""Run scripts in the process of a test, or in a rank of the pool."""
import importlib
import os
import signal

from core.cli import UserError, print_error
from tests.helpers.trainer import run_script

ASKED_AT = f"{__name__}.asked_at"       # of pool.run


def run(script, argv):
    """script.main(argv); a UserError is printed in one line and exits with status 1."""
    try:
        script.main([str(word) for word in argv])
    except UserError as error:
        print_error(f"error: {error}")
        raise SystemExit(1)


def asked_at(script, argv, module, name, number):
    """Run a trainer's script; SIGTERM arrives at call `number` of a module's function."""
    module, calls = importlib.import_module(module), []
    real = getattr(module, name)

    def call(*args, **options):
        calls.append(1)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **options)
    setattr(module, name, call)
    run_script(script, argv)
