"""HTTP towards the client: the server's protocol, the routes, the relay."""
