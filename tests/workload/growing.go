// A Go program, with a list of arrays that grows every 10 ms, after the first line and until there is another.
//
// The protocol is that of workload.h.
package main

import (
	"fmt"
	"os"
	"time"
)

var kept [][]byte

func main() {
	lines := make(chan bool)

	go func() {
		var line [1]byte

		for {
			_, err := os.Stdin.Read(line[:])
			lines <- err == nil
		}
	}()
	fmt.Println("ready", os.Getpid())
	<-lines
	for grows := true; grows; {
		select {
		case <-lines:
			grows = false
		case <-time.After(10 * time.Millisecond):
			for i := 0; i < 67; i++ {
				kept = append(kept, make([]byte, 2000))
			}
		}
	}
	fmt.Println("done", "arrays="+fmt.Sprint(len(kept)))
	<-lines
}
