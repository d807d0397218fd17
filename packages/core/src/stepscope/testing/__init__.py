"""For tests of code that uses or extends stepscope.

`engine_conformance.EngineConformance` and `backend_conformance.BackendConformance` are suites to subclass;
`fake_engine` and `fake_backend` pass them without an engine or a profiler; `steps` builds captured steps with
a known answer. Import the modules: pytest is needed for the first two only.
"""
