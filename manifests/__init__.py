"""What is on disk: manifest, shards, records, codecs, recovery and facts of the target model."""
