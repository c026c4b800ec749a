"""What is printed of users' files, by the names that common/ has for it; see core/cli.py."""
from core.cli import HIDDEN, UserError, counted, error_text, print_error, printable, without_secrets
from core.cli import require as need

__all__ = ["GIB", "HIDDEN", "LINE", "LINES", "NAME", "WHAT", "UserError", "counted", "error_text", "need",
           "print_error", "printable", "size", "without_secrets"]
NAME, WHAT, LINE, LINES = 80, 500, 2000, 60
GIB = 2**30


def size(n):
    """Bytes as text."""
    return f"{n / GIB:,.2f} GiB" if n >= GIB / 10 else f"{n / 2**20:,.2f} MiB"
