/* SPDX-License-Identifier: BSD-2-Clause */
/* A Python module that compares names, and leaks where their lengths differ. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

struct name {
	size_t length;
	char text[];
};

static struct name *copy_of(const char *text, size_t length)
{
	struct name *name = malloc(sizeof(*name) + length + 1);

	if (name) {
		name->length = length;
		memcpy(name->text, text, length + 1);
	}
	return name;
}

static PyObject *compare(PyObject *module, PyObject *args)
{
	const char *first, *second;
	Py_ssize_t lengths[2];
	struct name *left, *right;
	long order;

	if (!PyArg_ParseTuple(args, "s#s#", &first, &lengths[0], &second, &lengths[1]))
		return NULL;
	left = copy_of(first, lengths[0]);
	right = copy_of(second, lengths[1]);
	if (!left || !right)
		return PyErr_NoMemory();
	if (left->length != right->length)
		return PyLong_FromLong(left->length < right->length ? -1 : 1);
	order = memcmp(left->text, right->text, left->length);
	free(left);
	free(right);
	return PyLong_FromLong(order);
}

static PyMethodDef functions[] = { { "compare", compare, METH_VARARGS, NULL }, { 0 } };
static struct PyModuleDef module = {
	PyModuleDef_HEAD_INIT,
	.m_name = "names",
	.m_methods = functions,
};

PyMODINIT_FUNC PyInit_names(void)
{
	return PyModule_Create(&module);
}
