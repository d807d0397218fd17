"""Code that cannot be edited: patches, and the steps they mark."""
