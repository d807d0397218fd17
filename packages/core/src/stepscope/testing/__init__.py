"""Test tools for code that uses or extends stepscope.

`engine_conformance.EngineConformance` and `backend_conformance.BackendConformance` are suites to subclass;
`fake_engine` and `fake_backend` pass them without an engine or a profiler; `steps` builds captured steps with
a known answer. `plugin` has pytest fixtures for code that is instrumented: a `recorded_run.RecordedRun` and a
`recorded_run.FakeClock`. Import the modules: pytest is needed for the suites and `plugin` only.
"""
