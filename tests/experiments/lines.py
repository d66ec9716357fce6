"""Files of JSON lines for tests."""

import json


def write(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return str(path)


def records(count):
    return [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(count)]
