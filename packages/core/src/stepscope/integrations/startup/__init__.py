"""The folder of the `sitecustomize` that `stepscope run` puts before every Python program that it starts."""
