"""Pages of one HTML file each, with figures and tables; this package knows of no evaluation."""

from tdcollect.packages import lazy

__getattr__, __dir__, __all__ = lazy(__name__, modules="view")
