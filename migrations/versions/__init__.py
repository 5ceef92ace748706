"""One file a revision, which defines the tables that it touches and imports `migrations.ddl` alone."""
