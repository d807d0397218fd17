"""Recording of code that is not edited: patched functions, and the steps that their calls bound."""
