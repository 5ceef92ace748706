"""The routes and what stands around them: middleware, the page, the OpenAPI document."""
