// C that is called from Go, and Go that C calls back.
//
//	callback COUNT SIZE   leaks COUNT blocks of SIZE bytes in C that a goroutine calls, and
//	                      as many in C that is called by Go that is called by C
//
// The protocol is that of workload.h.
package main

/*
#include <stdlib.h>

extern void goCallback(void);

static void leak(int count, int size)
{
	while (count--)
		*(volatile char *)malloc(size) = 1;
}

static void call_back(void)
{
	goCallback();
}
*/
import "C"

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
)

var count, size C.int

//go:noinline
func fromGo() {
	C.leak(count, size)
}

//export goCallback
func goCallback() {
	fromCallback()
}

//go:noinline
func fromCallback() {
	C.leak(count, size)
}

//go:noinline
func throughC() {
	C.call_back()
}

func number(text string) C.int {
	value, err := strconv.Atoi(text)
	if err != nil {
		panic(err)
	}
	return C.int(value)
}

func main() {
	count, size = number(os.Args[1]), number(os.Args[2])
	input := bufio.NewReader(os.Stdin)
	fmt.Println("ready", os.Getpid())
	input.ReadString('\n')
	ended := make(chan bool)
	go func() {
		fromGo()
		ended <- true
	}()
	<-ended
	throughC()
	fmt.Println("done")
	input.ReadString('\n')
}
