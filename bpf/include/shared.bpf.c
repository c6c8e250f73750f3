// SPDX-License-Identifier: BSD-2-Clause
/*
 * No tool: what the headers share with user space, so that the library has
 * one generated definition of it (src/bpf/types.rs) and no copy typed by hand.
 */
#include "filter.bpf.h"
#include "histogram.bpf.h"
#include "python_code.bpf.h"
#include "stack.bpf.h"
#include "stack_count.bpf.h"

struct filter *unused_filter __attribute__((unused));
struct histogram *unused_histogram __attribute__((unused));
struct python_code *unused_python_code __attribute__((unused));
struct python_process *unused_python_process __attribute__((unused));
enum python_chain *unused_python_chain __attribute__((unused));
enum python_mark *unused_python_mark __attribute__((unused));
enum python_instruction *unused_python_instruction __attribute__((unused));
struct room *unused_room __attribute__((unused));
enum room_of *unused_room_of __attribute__((unused));
struct stack *unused_stack __attribute__((unused));
struct stack_count_key *unused_stack_count_key __attribute__((unused));
struct stack_count *unused_stack_count __attribute__((unused));
enum unwind_kind *unused_unwind_kind __attribute__((unused));
enum unwind_frame_pointer *unused_unwind_frame_pointer __attribute__((unused));
struct unwind_file *unused_unwind_file __attribute__((unused));
struct unwind_request *unused_unwind_request __attribute__((unused));
enum stack_end *unused_stack_end __attribute__((unused));
struct stack_slot *unused_stack_slot __attribute__((unused));
enum unwind_mode *unused_unwind_mode __attribute__((unused));
