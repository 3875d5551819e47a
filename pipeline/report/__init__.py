"""Reports of a run for people: status, page, charts, observer and webhook."""
