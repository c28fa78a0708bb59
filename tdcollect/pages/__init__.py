"""Pages of one HTML file each, with figures and tables; this package knows of no evaluation."""

from tdcollect.lazy import lazy

__getattr__, __dir__ = lazy(__name__, {}, modules="view")
