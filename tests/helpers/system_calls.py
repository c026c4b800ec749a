"""System calls of this process that the kernel refuses from here on: what a bad disk or an odd file system answers."""
import ctypes
import errno
import platform
import struct

NUMBERS = {"x86_64": {"flock": 73, "fsync": 74}, "aarch64": {"flock": 32, "fsync": 82}}


def refuse(call, error):
    """Answer the call with this errno; OSError where calls cannot be filtered. Holds for children, too, for ever."""
    number = NUMBERS[platform.machine()][call]
    program = b"".join(struct.pack("HBBI", *line) for line in (
        (0x20, 0, 0, 0),                        # load the number of the call
        (0x15, 0, 1, number),                   # unless it is this one, skip a line
        (0x06, 0, 0, 0x00050000 + error),       # refuse
        (0x06, 0, 0, 0x7FFF0000)))              # allow
    code, libc = ctypes.create_string_buffer(program), ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)      # PR_SET_NO_NEW_PRIVS, which the next one needs
    if libc.prctl(22, 2, struct.pack("HxxxxxxP", 4, ctypes.addressof(code))):       # PR_SET_SECCOMP
        raise OSError(ctypes.get_errno(), errno.errorcode[ctypes.get_errno()])
