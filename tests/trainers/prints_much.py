"""Prints faster than a log can take it: many lines, one endless line, bytes that are no text, a progress bar."""

import sys

out = sys.stdout.buffer
for number in range(int(sys.argv[1])):
    out.write(b"line %d\n" % number)
out.write(b"x" * 100_000 + b"\n")
out.write(bytes(range(256)) + b"\n")
for percent in range(101):
    out.write(b"\r%3d%%" % percent)
out.write(b"\nlast line, without an end")
out.flush()
