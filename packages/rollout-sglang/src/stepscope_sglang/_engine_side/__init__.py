"""Code that runs in SGLang's own processes, and the state that this code adds to their answers."""
