include Makefile
chk:
	$(CARGO) clippy $(FLAGS) --test e2e -- -D warnings
