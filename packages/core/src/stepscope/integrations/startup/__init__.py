"""The folder of a `sitecustomize` module, which Python imports first in programs started by
`stepscope run`.
"""
