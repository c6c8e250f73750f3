// .NET with blocks of a known size, which are malloc()'s: Keep() is called by Order(), that by Serve().
//
// usage: dotnet exec runtime.dll COUNT BYTES
using System;
using System.Diagnostics;
using System.Runtime.CompilerServices;
using System.Runtime.InteropServices;

static class Shop
{
	[DllImport("libc.so.6")]
	static extern IntPtr malloc(UIntPtr size);

	static IntPtr last;

	[MethodImpl(MethodImplOptions.NoInlining)]
	static void Keep(uint bytes)
	{
		last = malloc((UIntPtr)bytes);
		GC.KeepAlive(null);
	}

	[MethodImpl(MethodImplOptions.NoInlining)]
	static void Order(uint bytes)
	{
		Keep(bytes);
		GC.KeepAlive(null);
	}

	[MethodImpl(MethodImplOptions.NoInlining)]
	static void Serve(uint count, uint bytes)
	{
		for (uint block = 0; block < count; block++)
			Order(bytes);
	}

	static void Main(string[] arguments)
	{
		Console.WriteLine("ready {0}", Process.GetCurrentProcess().Id);
		Console.ReadLine();
		Serve(uint.Parse(arguments[0]), uint.Parse(arguments[1]));
		Console.WriteLine("done");
		Console.ReadLine();
	}
}
