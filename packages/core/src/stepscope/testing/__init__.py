"""Tools for tests of code that uses or extends stepscope.

`engine_conformance.EngineConformance` and `backend_conformance.BackendConformance` are test suites to
subclass. `fake_engine` and `fake_backend` pass these suites without an engine or a profiler. `steps` builds
folders of captured steps with known content. `plugin` has pytest fixtures for tests of instrumented code: a
`recorded_run.RecordedRun` and a `recorded_run.FakeClock`. Only the suites and `plugin` need pytest.
"""
