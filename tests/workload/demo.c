/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * A small server with a leak, for `make demo`: three call paths allocate, and
 * one of them forgets to free.
 *
 *   parse_request    balanced: frees what it allocates
 *   remember_session a growing cache: memory that is still in use
 *   log_request      leaks 4 KiB of a message now and then
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct session {
	struct session *next;
	int id;
	char data[96];
};

static struct session *sessions;

static __attribute__((noinline)) char *format_message(int request)
{
	char *message = malloc(4096);

	if (message)
		snprintf(message, 4096, "request %d", request);
	return message;
}

static __attribute__((noinline)) void log_request(int request)
{
	char *message = format_message(request);

	if (request % 2) /* the bug: an early return that forgets the message */
		return;
	free(message);
}

static __attribute__((noinline)) void remember_session(int id)
{
	struct session *session = calloc(1, sizeof(*session));

	if (!session)
		return;
	session->id = id;
	session->next = sessions;
	sessions = session;
}

static __attribute__((noinline)) int parse_request(int request)
{
	char *copy = strdup("GET /index.html HTTP/1.1");
	int length = copy ? (int)strlen(copy) : 0;

	free(copy);
	return length + request;
}

static __attribute__((noinline)) void serve(int request)
{
	parse_request(request);
	remember_session(request);
	log_request(request);
}

int main(void)
{
	for (int request = 0;; request++) {
		serve(request);
		usleep(2000);
	}
}
