"""The web console of a gateway: its page and assets, the state that the page polls, and the history of ended requests
that it shows.

`routes.Console` serves it over HTTP and receives the record of each ended request. `history` keeps the last records and
sums of the last minutes, `snapshot` reads the current state of the gateway and its workers, and `view` composes from
both what one tenant may see, as the JSON that `schema` defines. Read `routes` first, then `view`."""
