"""Engine ``chunked``: vocabulary tiles times token chunks, on any device."""
