"""Parts of the answer to `stepscope why`."""
