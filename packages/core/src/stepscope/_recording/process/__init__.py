"""Facts and services of this process: identity, private loop, forks, errors, and the end of the process."""
