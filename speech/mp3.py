"""MP3 files that do not say how long they are, as programs write them into a pipe.

Decoders then guess the length from the first frames. With a variable bitrate the guess is wrong, and what lies behind
it is never read. Layout of a frame's header: ISO/IEC 11172-3 and 13818-3; of the frame with the length: the "Xing"
header, whose fields are flags and, by flag 1, the number of frames. Standard library only.
"""

KBITS = {True: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),     # of layer III, by index - 1:
         False: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)}        # MPEG 1, and MPEG 2 and 2.5
HERTZ = (44100, 48000, 32000)       # of MPEG 1; of MPEG 2 half, of MPEG 2.5 a quarter
SHIFT = {3: 0, 2: 1, 0: 2}          # by the header's version
TAGS = (b"Xing", b"Info", b"VBRI")


def says_length(file):
    """Whether the MP3 in a binary file begins with a frame that holds its length."""
    head = file.read(10)
    file.seek(_first(head))
    first = file.read(200)
    at = next((first.find(tag) for tag in TAGS if tag in first), -1)
    if at < 0 or first[at:at + 4] == b"VBRI":
        return at >= 0
    return bool(first[at + 7] & 1 and any(first[at + 8:at + 12]))


def with_length(data):
    """The bytes of an MP3 file behind a frame that says how many there are; unchanged if no frame is found."""
    first = at = _sync(data, _first(data))
    frames = 0
    while 0 <= at < len(data):
        frames, at = frames + 1, at + _size(data[at:at + 4])
        if at < len(data) and not _size(data[at:at + 4]):       # tags at the end, or damage
            at = _sync(data, at)
    if not frames or data[_first(data):].startswith(b"fLaC"):
        return data
    _, version, rate, channels = data[first:first + 4]
    header = bytes([0xFF, version | 1, 0xE0 | rate & 0x0C, channels])           # the largest frame, without checksum
    mono, mpeg1 = channels >> 6 == 3, version >> 3 & 3 == 3
    side = {(True, True): 17, (True, False): 32, (False, True): 9, (False, False): 17}[mpeg1, mono]
    frame = header + bytes(side) + b"Xing" + (1).to_bytes(4, "big") + frames.to_bytes(4, "big")
    return frame.ljust(_size(header), b"\0") + data[first:]


def _first(head):
    """Where the first frame is expected: behind an ID3v2 tag, whose size has 7 bits a byte."""
    if head[:3] != b"ID3" or len(head) < 10:
        return 0
    return 10 + sum((byte & 0x7F) << 7 * (3 - i) for i, byte in enumerate(head[6:10]))


def _size(header):
    """Bytes of the layer III frame with this header of 4 bytes; 0 for what is none."""
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE6 != 0xE2:
        return 0
    version, bits, rate = header[1] >> 3 & 3, header[2] >> 4, header[2] >> 2 & 3
    if version not in SHIFT or bits in (0, 15) or rate == 3:
        return 0
    kbits = KBITS[version == 3][bits - 1]
    return (144 if version == 3 else 72) * kbits * 1000 // (HERTZ[rate] >> SHIFT[version]) + (header[2] >> 1 & 1)


def _sync(data, at):
    """Where the next frame begins that another one, or the end, follows; -1 for none."""
    while (at := data.find(b"\xff", at)) >= 0:
        size = _size(data[at:at + 4])
        if size and (at + size >= len(data) or _size(data[at + size:at + size + 4])):
            return at
        at += 1
    return -1
