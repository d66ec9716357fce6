"""Event files, as tensorboardX reads them."""

import struct

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from experiments.runs.event_file import EventFile


def events_of(folder):
    """The messages of the folder's only event file, whose checksums are tensorboardX's."""
    (file,) = folder.glob("events.out.tfevents.*")
    content, position, events = file.read_bytes(), 0, []
    while position < len(content):
        size = content[position : position + 8]
        (length,) = struct.unpack("<Q", size)
        message = content[position + 12 : position + 12 + length]
        checks = struct.unpack("<I", content[position + 8 : position + 12]), content[position + 12 + length :][:4]
        assert checks == ((masked_crc32c(size),), struct.pack("<I", masked_crc32c(message)))
        events.append(Event.FromString(message))
        position += 16 + length
    assert position == len(content)
    return events


def written(tmp_path, scalars, step=1, purge_step=None, folder="board"):
    file = EventFile(tmp_path / folder, purge_step)
    file.add(step, scalars)
    file.close()
    return events_of(tmp_path / folder)


@pytest.mark.parametrize("step", [0, 1, 127, 128, 300, 2**31, 2**62])
def test_a_file_says_what_tensorboardx_would_have_said(tmp_path, step):
    scalars = {"reward": 0.75, "länge/mean": -3.0, "": 0.0, "long " * 40: 1e-3}
    version, start, values = written(tmp_path, scalars, step, purge_step=step)
    assert version == Event(wall_time=version.wall_time, file_version="brain.Event:2")
    assert start == Event(wall_time=start.wall_time, step=step, session_log=SessionLog(status=SessionLog.START))
    summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()])
    assert values == Event(wall_time=values.wall_time, step=step, summary=summary)
    assert 1.7e9 < version.wall_time <= values.wall_time


def test_numbers_are_rounded_to_fp32(tmp_path):
    scalars = {"third": 1 / 3, "large": 1e300, "low": -1e300, "integer": 7, "numpy": np.float32(0.1)}
    _, values = written(tmp_path, scalars)
    found = [value.simple_value for value in values.summary.value]
    assert found == [np.float32(1 / 3), np.inf, -np.inf, 7.0, np.float32(0.1)]
    (_, nan) = written(tmp_path, {"nan": float("nan")}, folder="nan")
    assert np.isnan(nan.summary.value[0].simple_value)
