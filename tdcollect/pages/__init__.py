"""Pages of one HTML file each, with figures and tables; this package knows of no evaluation."""
