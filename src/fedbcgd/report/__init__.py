"""Reports about runs on disk (the page and its server, hours on networks) and about this machine (`doctor`)."""
