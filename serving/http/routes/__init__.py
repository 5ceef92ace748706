"""The routes, their middleware, the web page and the OpenAPI document."""
