"""Files that SGLang's profilers write: their names, their contents, their ranks."""
