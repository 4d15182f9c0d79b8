"""The import job as a whole, on each of its two sites."""

from tests.support.sites import embedded_site, migrated, services_site, sink, site

__all__ = ["embedded_site", "migrated", "services_site", "sink", "site"]
