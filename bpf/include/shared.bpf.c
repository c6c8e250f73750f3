// SPDX-License-Identifier: BSD-2-Clause
/*
 * Types that the headers share with user space. This object belongs to no tool: the library takes
 * its one generated definition of each type from here (src/bpf/types.rs), so no copy is typed by
 * hand.
 */
#include "cgroup_path.bpf.h"
#include "filter.bpf.h"
#include "histogram.bpf.h"
#include "python_code.bpf.h"
#include "stack.bpf.h"
#include "stack_count.bpf.h"

EXPORT_TYPE(struct cgroup_path);
EXPORT_TYPE(struct filter);
EXPORT_TYPE(enum filter_table);
EXPORT_TYPE(struct histogram);
EXPORT_TYPE(struct hotspot_process);
EXPORT_TYPE(enum hotspot_layout);
EXPORT_TYPE(struct python_code);
EXPORT_TYPE(struct python_process);
EXPORT_TYPE(enum python_chain);
EXPORT_TYPE(enum python_mark);
EXPORT_TYPE(enum python_instruction);
EXPORT_TYPE(struct fill_level);
EXPORT_TYPE(enum table_id);
EXPORT_TYPE(struct stack);
EXPORT_TYPE(struct stack_count_key);
EXPORT_TYPE(struct stack_count);
EXPORT_TYPE(enum unwind_kind);
EXPORT_TYPE(enum unwind_layout);
EXPORT_TYPE(enum unwind_frame_pointer);
EXPORT_TYPE(enum unwind_row_layout);
EXPORT_TYPE(enum unwind_subject);
EXPORT_TYPE(struct unwind_file);
EXPORT_TYPE(struct unwind_request);
EXPORT_TYPE(enum stack_end);
EXPORT_TYPE(enum stack_flags);
EXPORT_TYPE(enum stack_id);
EXPORT_TYPE(enum stack_layout);
EXPORT_TYPE(struct stack_slot);
EXPORT_TYPE(enum unwind_mode);
