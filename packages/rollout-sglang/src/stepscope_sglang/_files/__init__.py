"""Names, contents and ranks of the files that SGLang's profilers write."""
