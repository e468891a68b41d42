from tests.core.fake_plugins import site

__all__ = ["site"]
