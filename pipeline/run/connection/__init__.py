"""The connection to Ray: a cluster that is joined, or a private Ray started here."""
