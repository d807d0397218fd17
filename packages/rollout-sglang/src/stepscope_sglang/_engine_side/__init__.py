"""Code that runs in SGLang's own processes."""
