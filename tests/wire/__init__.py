"""What goes over the wire: a corpus of requests, and what becomes of each on a real socket."""
