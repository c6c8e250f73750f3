/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * A library for unwind.c: calls back.
 */
void through_plugin(void (*back)(void))
{
	back();
	__asm__ volatile("" : : : "memory");
}
