"""A script with a main(argv), run in the process of a test."""
from core.cli import UserError, error_text, print_error


def run(script, argv):
    """script.main(argv), which ends as its own process would: a UserError is one line, status 1."""
    try:
        script.main([str(word) for word in argv])
    except UserError as error:
        print_error(error_text(f"error: {error}"))
        raise SystemExit(1)
