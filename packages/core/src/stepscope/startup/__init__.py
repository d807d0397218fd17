"""What `stepscope run` puts before every Python program that it starts: `sitecustomize`, beside this."""
