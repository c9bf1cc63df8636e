"""Selection laws; `gear_offline.selection` is the public way in and registers them all."""
