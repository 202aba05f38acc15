"""What `measure.sh` runs beside the commands of `loadtest`: small programs, nothing to import."""
