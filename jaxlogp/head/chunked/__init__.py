"""Engine ``chunked``: vocabulary tiles × token chunks, on any device."""
