"""Writes a merged timeline as Perfetto's protobuf instead of Chrome's JSON."""
