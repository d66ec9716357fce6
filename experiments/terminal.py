"""Text from elsewhere (a model, a path, an exception) made safe to print on a terminal."""

import re

# C0, DEL and C1 controls; line separators; overrides of the direction, which change the order of what is read; halves of
# surrogate pairs, which cannot be encoded.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, keep: str = "\n\t") -> str:
    r"""Replaces control characters, except those to keep, by their escapes in Python, such as ``\x1b``.

    A terminal obeys them: they rewrite lines that are on the screen, set its title, or write to the clipboard.

    Example:
        >>> print(printable("a\x1b[2Jb\r\n"))
        a\x1b[2Jb\r
        <BLANKLINE>
    """
    return _CONTROLS.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)
