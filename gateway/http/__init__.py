"""HTTP: connections, routes, keys, bodies, streams of events."""
