"""The `sitecustomize` beside this, which `stepscope run` puts before every Python program that it starts."""
