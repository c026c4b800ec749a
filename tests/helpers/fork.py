"""A measurement in a process that has no thread but its own: those of earlier tests may import or compile meanwhile."""
import multiprocessing


def in_a_fork(measure):
    """Result of measure() in a fork of this process; EOFError when it raises, whose traceback is printed."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(measure()))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()
