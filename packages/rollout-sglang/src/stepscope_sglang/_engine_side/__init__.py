"""Code that runs in SGLang's own processes, and the state that it shows."""
